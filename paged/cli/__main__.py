from paged.cli import main

main()
