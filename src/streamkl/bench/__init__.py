"""The benchmark: what is measured (`suites`), against whom (`contestants`), and how (`gate`, `measure`, `isolated`).

The package itself never imports it; ``streamkl bench`` does.
"""
