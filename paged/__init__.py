"""Client of Paged: generated stubs in `paged.v1`."""
