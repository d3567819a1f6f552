"""Looking inside a model: counts, curves, positions, and where each head looks, in one HTML file.

`counts` the parameters by part · `history` what metrics.jsonl tells · `attention` the weights of every layer and head ·
`sentence` one pair under the lens · `charts` lines as SVG · `page` the HTML · `report` all of it joined, as data.
"""
