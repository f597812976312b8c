"""Writing one attention as blocks: what the pass block-attention emits for a site.

Scores of a block are computed by the exporter's own chain, replayed on slices: heads, rows (queries) and columns
(keys). Query and head blocks keep the exporter's softmax; key blocks use a running softmax (Milakov and Gimelshein
2018; Dao et al. 2022): m the maximum so far, l the sum of exponentials, acc the weighted values.
"""
