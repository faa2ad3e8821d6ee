"""Generated protobuf stubs of the public API and the plan stream."""
