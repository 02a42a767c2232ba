"""Write the raw tables of a small made-up shop, with its schema and definition, into a folder: ``python make_shop.py FOLDER``."""

import random
import shutil
import sys
from pathlib import Path

import polars as pl

DAY = 86_400


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(1)
    log, buys = [], []
    for request in range(1_200):
        user, at = draw.randrange(60), draw.randrange(2 * DAY)
        for item in draw.sample(range(40), k=3):
            clicked = int(draw.random() < 0.5 / (1 + item / 10))
            log.append((user if draw.random() < 0.99 else None, request, f"item-{item}", at * 1000 + draw.randrange(1000), clicked))
            if clicked and draw.random() < 0.3:
                buys.append((user, f"item-{item}", at + draw.randrange(5_000)))
    frame = pl.DataFrame(log, schema=["user_id", "request_id", "item", "shown_at", "clicked"], orient="row")
    frame.filter(pl.col("shown_at") < DAY * 1000).write_csv(folder / "log-monday.csv")
    frame.filter(pl.col("shown_at") >= DAY * 1000).write_csv(folder / "log-tuesday.csv")
    pl.DataFrame(buys, schema=["user_id", "item", "bought_at"], orient="row").write_parquet(folder / "buys.parquet")
    users = [(user, draw.choice(["AT", "CH", "DE"])) for user in range(55)]  # five users are in no table
    pl.DataFrame(users, schema=["user_id", "country"], orient="row").write_csv(folder / "users.csv")
    prices = [(f"item-{item}", since, round(draw.uniform(1, 9), 2)) for item in range(40) for since in (-1, draw.randrange(2 * DAY))]
    pl.DataFrame(prices, schema=["item", "since", "price"], orient="row").write_csv(folder / "prices.csv")
    for name in ("schema.toml", "definition.toml"):
        shutil.copy(Path(__file__).parent / name, folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
