"""``streamkl selfcheck``: is it right, repeatable, flat in memory and fast on this device? One report to post.

``checks.py`` runs the project's own checks, ``report.py`` writes what they found. Timings are ``streamkl bench``'s.
"""
