"""Other engines, each run by an interpreter of its own that has it installed; nothing of ours is imported there.

A script reads one job as JSON from its standard input: `model` (directory), `cache_dir`, `num_running`,
`prefix_caching`, `warm_up` and `requests` (lists of {"prompt", "max_tokens"}) and the `rest_s` seconds between these
two; `result_file`, where {"tokens": ..., "seconds": ..., "start_s": ...} is to be written.
"""
