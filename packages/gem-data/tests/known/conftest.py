"""Raw files of every known data set: a few rows made up by hand in each one's own form, the unusual ones among them."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gem_data.known.registry import known_data_set
from gem_data.known.tables import KnownTable


def put(folder: Path, name: str, text: str, *, encoding: str = "utf-8") -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    content = text.encode(encoding)
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)


def ml_100k(at: Path) -> None:
    put(at, "u.data", "7\t2\t4\t880000020\n9\t1\t3\t880000010\n7\t1\t5\t880000020\n9\t3\t1\t880000030\n7\t3\t4\t880000040\n9\t2\t5\t880000050\n")
    put(at, "u.user", "7|24|F|writer|85711\n9|53|M|other|T8H1N\n")
    flags = ["0|0|0|0|1|1" + "|0" * 13, "0" + "|0" * 17 + "|1", "1" + "|0" * 18]
    films = ["Amélie à Paris (1995)|01-Jan-1995||http://x.test/a?b", "Plain, With Comma (1994)|05-Feb-1994||", "unknown|||"]
    put(at, "u.item", "".join(f"{k + 1}|{film}|{flag}\n" for k, (film, flag) in enumerate(zip(films, flags, strict=True))), encoding="latin-1")


def ml_1m(at: Path) -> None:
    put(
        at,
        "ratings.dat",
        "1::10::5::978300760\n1::20::3::978300760\n2::10::4::978300761\n2::30::1::978300762\n1::30::4::978300763\n2::20::5::978300764\n",
    )
    put(at, "users.dat", "1::F::1::10::48067\n2::M::56::16::70072-1234\n")
    put(
        at,
        "movies.dat",
        "Á".join(["10::Caf", ": A (Film), 1999 (1999)::Drama|War\n"]) + '20::"Quoted" (1990)::Comedy\n30::Plain (1980)::Sci-Fi\n',
        encoding="latin-1",
    )


def ml_20m(at: Path) -> None:
    put(
        at,
        "ratings.csv",
        "userId,movieId,rating,timestamp\n1,2,3.5,1112486027\n1,29,4.0,1112484676\n2,2,0.5,1112484677\n2,29,4.5,1112484999\n1,3,5.0,1112489999\n",
    )
    put(
        at,
        "movies.csv",
        'movieId,title,genres\n2,"Cité, La (1995)",Drama|Mystery\n29,日本 (2001),(no genres listed)\n3,"The ""Best"" (2000)",Comedy\n',
    )


LOG = "user_id,video_id,date,hourmin,time_ms,is_click,is_like,is_follow,is_comment,is_forward,is_hate,long_view,play_time_ms,duration_ms"
LOG += ",profile_stay_time,comment_stay_time,is_profile_enter,is_rand,tab\n"


def kuairand(size: str, parts: bool) -> Callable[[Path], None]:
    def write(at: Path) -> None:
        def log(name: str, *rows: str) -> None:
            if parts:
                for k, row in enumerate(rows, start=1):
                    put(at, f"data/{name}_{size}_part{k}.csv", LOG + row + "\n")
            else:
                put(at, f"data/{name}_{size}.csv", LOG + "".join(row + "\n" for row in rows))

        log(
            "log_standard_4_08_to_4_21",
            "1,50,20220408,900,1649379600123,1,1,0,0,0,0,1,12000,10000,0,0,0,0,1",
            "2,51,20220409,1000,1649469600500,0,0,0,0,0,1,0,0,9000,0,0,0,0,4",
        )
        log(
            "log_standard_4_22_to_5_08",
            "2,50,20220422,900,1650589200001,1,0,1,0,0,0,1,9999,10000,5,0,1,0,1",
            "3,52,20220423,30,1650645000999,0,0,0,0,0,0,0,10,8000,0,0,0,0,1",
        )
        log(
            "log_random_4_22_to_5_08",
            "1,52,20220424,100,1650733200000,0,0,0,0,0,0,0,0,8000,0,0,0,1,0",
            "3,51,20220424,100,1650733200000,1,0,0,0,0,0,0,0,9000,0,0,0,1,0",
        )
        header = "user_id,user_active_degree,is_lowactive_period,is_live_streamer,is_video_author,follow_user_num,follow_user_num_range"
        header += ",fans_user_num,fans_user_num_range,friend_user_num,friend_user_num_range,register_days,register_days_range,onehot_feat0\n"
        put(
            at,
            f"data/user_features_{size}.csv",
            header + '1,full_active,0,0,1,5,"(0,10]",3,"[1,10)",0,0,100,61-90,0\n2,UNKNOWN,0,-124,0,0,0,0,0,0,0,9,15-30,\n',
        )
        basic = (
            "video_id,author_id,video_type,upload_dt,upload_type,visible_status,video_duration,server_width,server_height,music_id,music_type,tag\n"
        )
        put(
            at,
            f"data/video_features_basic_{size}.csv",
            basic
            + '50,900,NORMAL,2022-03-01,ShortImport,1.0,10000.0,720,1280,77,9.0,"12,65"\n'
            + "51,901,AD,2022-03-02,,1.0,,720,1280,78,,8\n52,902,NORMAL,,LongImport,1.0,8000.0,720,1280,79,9.0,\n",
        )
        first, second = ("_part1", "_part2") if parts else ("", None)
        put(at, f"data/video_features_statistic_{size}{first}.csv", "video_id,counts,show_cnt,play_progress\n50,17,120.5,0.25\n")
        if second:
            put(at, f"data/video_features_statistic_{size}{second}.csv", "video_id,counts,show_cnt,play_progress\n51,3,,1e-3\n")

    return write


def criteo_line(label: int, first: str, second: str, category: str) -> str:
    return "\t".join([str(label), first, second, *[""] * 10, "260.0", category, *["0a1b2c3d"] * 24, ""])


def criteo_kaggle(at: Path) -> None:
    lines = [criteo_line(k % 2, str(k) if k else "", "-2" if k == 1 else "5", "ffffffff" if k == 2 else "") for k in range(8)]
    put(at, "train.txt", "\n".join(lines))  # no newline at the end


def criteo_1tb(at: Path) -> None:
    for day in (0, 2):
        put(at, f"day_{day}.gz", "".join(criteo_line(k % 2, str(day), "1", "68fd1e64") + "\n" for k in range(2)))
    put(at, "day_10.gz", "".join(criteo_line(k % 2, "10", "1", "68fd1e64") + "\n" for k in range(4)))


def avazu(at: Path) -> None:
    header = "id,click,hour,C1,banner_pos,site_id,site_domain,site_category,app_id,app_domain,app_category,device_id,device_ip,device_model"
    header += ",device_type,device_conn_type,C14,C15,C16,C17,C18,C19,C20,C21\n"
    site = "1fbe01fe,f3845767,28905ebd,ecad2386,7801e8d9,07d7df22"
    rows = [
        f"10000169349117863999,0,14102100,1005,0,{site},a99f214a,96809ac8,711ee120,1,0,15704,320,50,1722,0,35,100084,79",
        f"99999999999999999999,1,14102123,1005,0,{site},a99f214a,96809ac8,711ee120,1,0,15704,320,50,1722,0,35,-1,79",
        f"7,0,14103000,1002,-1,{site},c357dbff,00000001,711ee120,0,0,15705,320,50,1722,2,35,-1,79",
        f"8,1,14103001,1002,1,{site},c357dbff,00000002,711ee121,0,0,15705,320,50,1722,2,35,5,79",
    ]
    put(at, "train.gz", header + "".join(row + "\n" for row in rows))


def taobao_behaviour(at: Path) -> None:
    rows = [
        "1,11,100,pv,1511539200",
        "1,11,100,pv,1511539200",
        "1,11,100,buy,1511550000",
        "1,12,100,pv,1511700000",
        "2,12,100,cart,1511561733",
        "2,12,100,pv,1511561800",
        "2,13,101,pv,-2134949234",
        "2,13,101,pv,2122867355",
        "2,13,101,click,1511561900",
        "2,13,101,pv,1512316800",
        "1,13,101,pv,1512230400",
    ]
    put(at, "UserBehavior.csv", "\n".join(rows) + "\n")


def taobao_ads(at: Path) -> None:
    put(
        at,
        "raw_sample.csv",
        "user,time_stamp,adgroup_id,pid,nonclk,clk\n5,1494000003,1,430548_1007,1,0\n6,1494000002,2,430539_1007,0,1\n7,1494000004,3,430548_1007,1,0\n6,1494300000,1,430548_1007,1,1\n5,1494400000,2,430548_1007,0,1\n6,1494500000,1,430548_1007,1,0\n",
    )
    put(at, "ad_feature.csv", "adgroup_id,cate_id,campaign_id,customer,brand,price\n1,6406,83237,1,95471,170.0\n2,6406,83237,1,NULL,199.0\n")
    head = "userid,cms_segid,cms_group_id,final_gender_code,age_level,pvalue_level,shopping_level,occupation,new_user_class_level \r\n"
    put(at, "user_profile.csv", head + "5,0,5,2,5,,3,0,3\r\n6,0,5,1,5,2,3,0,\r\n")
    put(
        at,
        "behavior_log.csv",
        "user,time_stamp,btag,cate,brand\n5,1493999999,pv,1,2\n5,1493999990,ipv,6406,95471\n6,1493999991,cart,6406,NULL\n6,1494299999,buy,6406,3\n",
    )


def feature(field: str, identity: int, value: float) -> str:
    return f"{field}\x02{identity}\x03{value}"


def ali_ccp(at: Path) -> None:
    def line(*fields: object, features: list[str]) -> str:
        return ",".join([*map(str, fields), str(len(features)), "\x01".join(features)]) + "\n"

    own = [
        feature("205", 4, 1.0),
        feature("206", 5, 1.0),
        feature("508", 6, 0.5),
        feature("210", 7, 1.0),
        feature("210", 8, 1.0),
        feature("301", 1, 1.0),
    ]
    common = [feature("101", 31, 1.0), feature("109_14", 1, 2.25), feature("109_14", 2, 0.75), feature("121", 3, 1.0)]
    rows = [(1, 0, 0, "aa"), (2, 1, 1, "aa"), (3, 0, 1, "bb"), (4, 1, 0, "cc")]
    put(at, "sample_skeleton_train.csv", "".join(line(*row, features=own if row[0] != 4 else own[:1]) for row in rows))
    put(at, "sample_skeleton_test.csv", line(1, 1, 0, "bb", features=own[1:]) + line(2, 0, 0, "dd", features=own))
    put(at, "common_features_train.csv", line("aa", features=common) + line("bb", features=[]))
    put(at, "common_features_test.csv", line("dd", features=common[:1]))


def aliexpress(at: Path) -> None:
    names = ["search_id", *(f"categorical_{k}" for k in range(1, 17)), *(f"numerical_{k}" for k in range(1, 64)), "click", "conversion"]

    def row(search: int, click: int, conversion: int) -> str:
        return ",".join([str(search), *["3"] * 16, "0.8122229999999999", *["0.0"] * 62, str(click), str(conversion)]) + "\n"

    put(at, "train.csv", ",".join(names) + "\n" + row(1, 1, 1) + row(1, 0, 1) + row(2, 0, 0) + row(2, 1, 0))
    put(at, "test.csv", ",".join(names) + "\n" + row(3, 1, 1) + row(3, 0, 0))


USERS = ("A2SUAM1J3GNN3B", "A3R5OBKS7OM2IR")
RATINGS = [
    (USERS[0], "B00000IKRW", 5.0, 1000000000),
    (USERS[1], "0594481813", 3.0, 1000086400),
    (USERS[0], "0594481813", 4.0, 1000086400),
    (USERS[1], "B00000IKRW", 1.0, 1400000000),
]


def amazon(year: str) -> Callable[[Path], None]:
    def write(at: Path) -> None:
        if year == "2023":
            put(at, "Books.csv", "user_id,parent_asin,rating,timestamp\n" + "".join(f"{u},{i},{r},{t * 1000 + 123}\n" for u, i, r, t in RATINGS))
        else:
            put(
                at,
                "ratings_Books.csv",
                "".join(",".join(map(str, (u, i, r, t) if year == "2014" else (i, u, r, t))) + "\n" for u, i, r, t in RATINGS),
            )

    return write


def yambda(at: Path) -> None:
    listens = {
        "uid": [1, 1, 2, 1],
        "item_id": [5, 6, 5, 7],
        "timestamp": [0, 5, 5, 10],
        "is_organic": [1, 0, 1, 1],
        "played_ratio_pct": [130, 4, 100, 60],
        "track_length_seconds": [200, 180, 200, 95],
    }
    pq.write_table(pa.table(listens), at / "listens.parquet")
    pq.write_table(pa.table({"uid": [1, 2], "item_id": [5, 5], "timestamp": [5, 10], "is_organic": [1, 1]}), at / "likes.parquet")


def open_bandit(at: Path) -> None:
    head = ",timestamp,item_id,position,click,propensity_score,user_feature_0,user_feature_1,user_feature_2,user_feature_3"
    head += "".join(f",user-item_affinity_{k}" for k in range(80)) + "\n"

    def row(index: int, stamp: str, click: int, user: str) -> str:
        return f"{index},2019-11-24 00:00:{stamp}+00:00,{index},3,{click},0.0125,{user},u1,u2,u3" + ",0.0" * 79 + ",1.0\n"

    put(
        at,
        "random/all/all.csv",
        head + row(0, "23.800821", 0, "aa") + row(1, "24.000000", 1, "bb") + row(2, "24", 0, "aa") + row(3, "59.999999", 1, "bb"),
    )
    put(
        at,
        "random/all/item_context.csv",
        ",item_id,item_feature_0,item_feature_1,item_feature_2,item_feature_3\n" + "".join(f"{k},{k},-0.{k}5,a,b,c\n" for k in range(4)),
    )


def recbole(at: Path) -> None:
    rows = ["u1\ti1\t4\t100.0", "u1\ti2\t\t101", "u2\ti1\t2.5\t102.75", "u2\t\t5\t103", "u1\ti1\t5\t104", "u2\ti2\t4\t105", "u1\ti2\t1\t106"]
    put(at, "shop.inter", "user_id:token\titem_id:token\trating:float\ttimestamp:float\n" + "\n".join(rows) + "\n")
    put(at, "shop.item", 'item_id:token\tname:token_seq\tprices:float_seq\ni1\tA "quoted  film\t1 2.5\ni2\t\t\n')


SAMPLES: dict[str, Callable[[Path], None]] = {
    "ml-100k": ml_100k,
    "ml-1m": ml_1m,
    "ml-20m": ml_20m,
    "kuairand-pure": kuairand("pure", parts=False),
    "kuairand-1k": kuairand("1k", parts=False),
    "kuairand-27k": kuairand("27k", parts=True),
    "criteo-kaggle": criteo_kaggle,
    "criteo-1tb": criteo_1tb,
    "avazu": avazu,
    "taobao-behaviour": taobao_behaviour,
    "taobao-ads": taobao_ads,
    "ali-ccp": ali_ccp,
    "aliexpress": aliexpress,
    "amazon-ratings-2014": amazon("2014"),
    "amazon-ratings-2018": amazon("2018"),
    "amazon-ratings-2023": amazon("2023"),
    "yambda": yambda,
    "open-bandit": open_bandit,
    "recbole": recbole,
}


@pytest.fixture
def sample(tmp_path: Path) -> Callable[[str], Path]:
    """Writes the sample of a data set and gives its folder."""

    def written(name: str) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        SAMPLES[name](folder)
        return folder

    return written


@pytest.fixture
def rows() -> Callable[[KnownTable], pl.DataFrame]:
    """All rows of a table; its ledger must then add up."""

    def read(table: KnownTable) -> pl.DataFrame:
        frame = pl.concat([pl.DataFrame(pl.from_arrow(batch)) for batch in table.batches()])
        assert table.ledger["kept"] == frame.height
        assert sum(table.ledger.values()) == 2 * table.ledger["read"]
        return frame

    return read


@pytest.fixture
def read(sample: Callable[[str], Path], rows: Callable[[KnownTable], pl.DataFrame]) -> Callable[..., dict[str, pl.DataFrame]]:
    """All tables of the sample of a data set."""

    def tables(name: str, **choices: str) -> dict[str, pl.DataFrame]:
        return {table: rows(known) for table, known in known_data_set(name).tables(sample(name), **choices).items()}

    return tables


@pytest.fixture
def sample_names() -> list[str]:
    return json.loads(json.dumps(list(SAMPLES)))
