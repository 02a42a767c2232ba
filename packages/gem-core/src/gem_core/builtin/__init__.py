"""Core's own plugin: reference kernels, fp32 and bf16, one device, torch tables, the models and a toy source."""
