"""Our trainer: one process that turns windows of text into optimizer updates, exactly.

It is the first client of the same small surface that any foreign trainer uses. Of the supervisor
it imports only `contract`, `config`, `curriculum`, `coherence` and `link`; the supervisor imports
nothing of it. This file holds no code, so that importing one module costs only that module.

The map, from the leaves up:

- `flat`        one flat float32 buffer each for weights, moments and gradients, and the names in it
- `model`       the decoder: its shape, its tensor table, its forward pass and its loss
- `optimizer`   AdamW, clipping by the global norm, and the learning rate as a function of the step
- `device`      which device, which switches, what the process really runs on, the global generators
- `tokenizer`   text to token numbers and back, with a digest of the rule
- `documents`   where an arm's text comes from, as documents of bytes
- `corpus`      the documents of an arm as windows of tokens, with a digest of the data
- `sampler`     the order of the windows of one arm: permutation, cursor, round, own generator
- `data`        the tokenizer and the arms that the settings name
- `plan`        what the policy makes of the data: the curriculum of the next step
- `checkpoint`  writing, publishing and reading `step_NNNNNN.bin` and its manifest
- `recipe`      settings and a checkpoint's state to objects, and back
- `generate`    text from the model by an own generator, for sample audits
- `loop`        the order of one update, the boundary after it, and what may happen there
- `__main__`    the command line: train, and the checks that print JSON for the supervisor
"""
