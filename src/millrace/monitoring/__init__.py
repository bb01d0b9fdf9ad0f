"""How a broker is seen from outside: what its rooms count is collected when somebody asks, over HTTP.

`endpoint` is what a broker starts and stops; `web` answers HTTP, `collector` goes through the `parts` in short slices,
`lag` finds what groups have not read, `health` says whether the broker is ready. The names are in `metrics.catalog`.
Nothing here changes anything: it reads, on the loop, what others own.
"""
