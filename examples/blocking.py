"""The same without an event loop: python examples/blocking.py [ADDRESS]"""

import sys

from paged.blocking import BlockingClient


def main(address: str) -> None:
    with BlockingClient(address) as client:
        for message in client.generate("Once upon a time", max_tokens=32, temperature=0.8, seed=1):
            print(message.text, end="", flush=True)
        print()

        # Three samples of one prompt, which is computed and stored once.
        for sample in client.complete_samples("The capital of France is", n=3, max_tokens=8, seed=1):
            print(repr(sample.text), sample.usage.completion_tokens)


if __name__ == "__main__":
    main(*sys.argv[1:] or ["127.0.0.1:50051"])
