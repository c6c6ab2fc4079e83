"""Time to first token of a whole model through ``transformers``, dense against sparse, taken apart.

``models.py`` makes a model of a published shape or loads a checkpoint, ``gate.py`` checks it, ``allocator.py`` keeps
its memory, ``stopwatch.py`` tells where a pass spends its time, ``run.py`` measures, ``records.py`` keeps what it
found, ``plots.py`` draws it; ``layer.py`` measures one layer without a model. All but that need the ``hf``
extra.
"""
