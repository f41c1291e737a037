"""Attention whose sequence is shared by ranks: schemes p2p (a ring), all_gather, a2a (heads for tokens) and a2a+p2p.

`attention` plans a call, `schedule` divides it into blocks, `blocks` computes them over a ring or gathered keys,
`all_to_all` exchanges heads, `merge` combines partial results, `layout` knows the token order, `groups` the ranks.
"""
