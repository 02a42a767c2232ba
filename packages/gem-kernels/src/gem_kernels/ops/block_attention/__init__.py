"""Block attention in portable Triton, rotary embedding fused."""
