"""What ``gem bench`` measures of a whole run: steps, layers, where the time goes."""
