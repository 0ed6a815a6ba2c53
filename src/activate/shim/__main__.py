"""`python -m fi_arch_shim`: what this interpreter would do, as one JSON object."""
