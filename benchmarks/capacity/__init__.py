"""How many schedulers and executors a load takes: measured pieces, and a simulation made of them."""
