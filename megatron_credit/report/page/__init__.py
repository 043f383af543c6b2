"""The page of `megatron-credit inspect`: one HTML file with all it needs inside.

`run_files` reads a run directory, `vocabulary` turns token ids into pieces of text, `encode` packs
the rollouts, `write` puts them and the `assets` into the page. The page itself decodes a group when
somebody opens it.

Shape letters: T response tokens of all rollouts of one group, one after the other.
"""
