"""The machine: described in TOML, or found."""
