"""StreamKL inside other libraries, a package each; nothing in the core imports them."""
