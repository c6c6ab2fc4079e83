"""The benchmark: what is measured (`suites`), StreamKL and its baselines (`implementations`), how it is measured.

The package itself never imports it; ``streamkl bench`` does.
"""
