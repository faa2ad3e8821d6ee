"""Client of Paged: `paged.client` is its face, `paged.v1` the generated stubs.

Empty, because the services import the stubs too, and the executor has no use for grpcio.
"""
