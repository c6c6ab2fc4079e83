"""``streamkl selfcheck``: is it right, repeatable, flat in memory and fast on this device? One report that can be posted.

``checks.py`` runs the project's own checks, ``report.py`` writes what they found. Timings are those of ``streamkl bench``.
"""
