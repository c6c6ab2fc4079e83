"""Time to first token of a whole model through ``transformers``, dense against sparse, broken down.

``models.py`` makes a model of a published shape or loads a checkpoint, ``gate.py`` checks it, ``allocator.py`` keeps
its memory, ``stopwatch.py`` breaks the time of a pass down, ``run.py`` measures, ``records.py`` stores the results,
``plots.py`` draws them; ``layer.py`` measures one layer without a model. All but the last need the ``hf`` extra.
"""
