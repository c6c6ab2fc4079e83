"""Evaluation of sparse attention: quality and time of every method on the same contexts, and one report.

``streamkl oracle``, ``streamkl evaluate`` and ``streamkl lm-eval`` run it; nothing else imports it. ``haystack`` cuts
passages from text, ``tasks`` makes contexts of them, ``methods`` has the compared methods, ``subject`` is the model,
``layers`` measures its layers, ``run`` runs everything, ``records`` stores results, ``statistics`` and ``summary``
compute figures, ``plots`` and ``report`` show them.
"""
