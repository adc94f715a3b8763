"""What `nobackfill fit` decides on pairs of real pretrained models, against the truth.

`python -m bench.adoption --packages build/adoption`, after `make demo-adopt` has laid out its
models.
"""
