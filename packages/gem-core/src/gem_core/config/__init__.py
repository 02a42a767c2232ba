"""Configuration: TOML read into typed models, with the origin of every value."""
