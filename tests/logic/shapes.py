"""The kinds of worlds: their sizes, their faults, and the rates of these."""

from tests.logic.world import Shape

SHAPES = {
    "everything": Shape(),
    "every fourth block": Shape(granularity=4, depth=13, capacity=20),
    "two shards": Shape(shards=2, engines=4),
    "short": Shape(steps=200),
    "one owner": Shape(owners=1),
    "hot": Shape(steps=500, heat=4.0),
    "store": Shape(heat=4.0, faults="store wipe silence away late send owner full"),
    "store, busy": Shape(engines=2, partitions=1, heat=4.0, faults="store silence owner"),
    "feed": Shape(steps=500, faults="feed poison poll restart crash", heat=2.0),
    "feed without polling": Shape(steps=500, faults="feed restart crash", heat=2.0),
    "bus": Shape(faults="send stream recreate late slow crash owner request", heat=2.0),
    "damage": Shape(faults="damage send owner crash restart store", heat=2.0),
    "identity": Shape(faults="zombie clock crash wipe silence request late", heat=3.0),
}
