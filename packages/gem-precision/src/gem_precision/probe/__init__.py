"""What each format would cost a model in error, site by site, measured on batches that it trains on."""
