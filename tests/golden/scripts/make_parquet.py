"""Writes tests/golden/data/packed_CODEC.parquet: three rows of text in each codec of Parquet that
pyarrow writes.

Usage: python tests/golden/scripts/make_parquet.py tests/golden/data (pyarrow 26.0.1). Row groups of
two rows, without dictionaries and statistics, so that the pages themselves are packed.
"""
import sys

import pyarrow as pa
import pyarrow.parquet as pq

TEXTS = [f"The {word} " * 12 + f"{number}." for number, word in enumerate(("lantern", "Brücke", "河流"))]

for codec in ("gzip", "brotli", "lz4"):
    # pyarrow's "lz4" is LZ4_RAW of the format.
    table = pa.table({"text": TEXTS}).replace_schema_metadata(None)
    pq.write_table(table, f"{sys.argv[1]}/packed_{codec}.parquet", compression=codec, row_group_size=2,
                   use_dictionary=False, write_statistics=False, store_schema=False)
