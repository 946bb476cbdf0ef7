"""The stand-in Spark of test_spark.py gets a newer image, and goes back to the older one."""

from .. import test_spark
from ..small import Small
from ..test_spark import Spark, in_order

spark = test_spark.spark


def test_an_upgrade_and_the_way_back(spark: Spark, small_spark: Small) -> None:
    spark.start_hub()
    spark.compose("up", "--detach")
    spark.healthy()
    spark.hub.requests.clear()
    first, pins = spark.seen()["Config"]["Image"], small_spark.checkout / "pins.yaml"
    before = pins.read_text()
    pins.write_text(before.replace("  counter: 1 ", "  counter: 2 "))
    try:
        second = small_spark.bake()["tag"]
        assert spark.seen()["Config"]["Image"] == first  # it serves on
        spark.compose("up", "--detach")
        spark.healthy()
        assert spark.seen()["Config"]["Image"] == second != first
        version = spark.seen()["Config"]["Labels"]["org.opencontainers.image.version"]
        assert version.endswith("-spark.2")
        listed = spark.build("images", "--target", "spark")["images"]
        newest = [(one["image"], one["used"]) for one in listed[:2]]
        assert newest == [(second, True), (first, False)]

        found = spark.build("rollback", "--target", "spark")
        assert (found["image"], found["before"]) == (first, second)
        assert spark.seen()["Config"]["Image"] == second  # it serves on until Compose is called
        assert "42" in spark.answer()
        spark.compose("up", "--detach")
        spark.healthy()
        assert spark.seen()["Config"]["Image"] == first
        assert "42" in spark.answer()
        # the kernels of that build are still there, and so is the model
        in_order(spark.log(), "preflight: passed before", "ready after")
        assert spark.hub.requests == []
    finally:
        pins.write_text(before)
