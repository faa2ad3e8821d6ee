"""Pure bookkeeping: blocks, prefixes, sequences, plans. No I/O, no clock, no threads."""
