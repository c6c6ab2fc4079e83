"""What sparse attention costs a model and what it gains: the same contexts for every method, and one report.

``streamkl oracle``, ``streamkl evaluate`` and ``streamkl lm-eval`` run it; nothing else imports it. ``haystack`` cuts
passages from text, ``tasks`` makes contexts of them, ``methods`` says what is compared, ``subject`` is the model,
``layers`` looks into its layers, ``run`` goes through them all, ``records`` keeps what was found, ``statistics`` and
``summary`` say what it means, ``plots`` and ``report`` show it.
"""
