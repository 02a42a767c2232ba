"""``gem bench scale``: training steps on more and more ranks, where their time goes, and what the cost model had predicted."""
