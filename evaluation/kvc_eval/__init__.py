"""`sgl-kvc eval`: how right the answers stay, by policy, rate, length and kind of question.

cli.py          what the command line says; needs none of the libraries of sgl-kvc[eval]
command.py      starts servers if asked to, measures, writes
grid.py         policies × rates × lengths × question modes: the cells of one run
suites/         where prompts come from: ruler/, text/, recall.py, longbench.py
sample.py       one prompt: document, question, what is right
metrics.py      a score in [0, 1] of an answer
forced.py       right answers put into the model's mouth, and how likely it finds them
endpoint.py     the HTTP side: probe, ask, count tokens, try again
embedded.py     a server of our own on an embedded model
measure.py      asks every prompt of every cell
store.py        answers.jsonl: what is done and need not be asked again
results.py      scores, intervals and bytes of every cell
report.py       results.json and report.md; figure.py: the curves
provenance.py   versions, commit and machine of a result
"""
