#!/bin/sh
# Topics, records and groups from the command line; needs millrace, and a broker that runs (millrace up).
# Another address than localhost:9092 is named by MILLRACE_BOOTSTRAP.
set -eu

millrace topics create pages --partitions 3 --if-not-exists

# key:value lines in, a key and a value out
printf 'ada:/home\ngrace:/cart\nada:/checkout\n' | millrace produce pages --key-separator : --header source=shell
millrace consume pages --from-beginning --format '{partition}@{offset} {key} -> {value} ({headers})'

# as a group: what was read once is not read again
millrace consume pages --group page-readers --from-beginning --no-follow
millrace groups describe page-readers
millrace groups reset page-readers --topic pages --to-earliest --execute

# a copy, with keys, headers and timestamps
millrace topics create pages-copy --partitions 3 --if-not-exists
millrace consume pages --from-beginning --json | millrace produce pages-copy --json
millrace topics list 'pages*'
