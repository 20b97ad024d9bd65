"""Other libraries on reversible networks: BackPACK and Opacus."""
