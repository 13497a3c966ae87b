# shellcheck shell=bash disable=SC2034
# Everything the scripts of this folder ask for. A variable of the environment comes before the value
# here, and TPU_SETTINGS names another file of this form.

# Where, and what. The first two have no default.
: "${TPU_PROJECT:=}"                      # the id of the Google Cloud project
: "${TPU_ZONE:=}"                         # where the project has quota, such as us-west4-a
: "${TPU_NAME:=demyrl}"                   # of the machine that is made, and of the request for it
: "${TPU_TYPE:=v5litepod-16}"             # v5litepod-1, -4 or -8: one host; -16 and more: a slice
: "${TPU_RUNTIME:=v2-alpha-tpuv5-lite}"   # v6e: v2-alpha-tpuv6e; v5p: v2-alpha-tpuv5

# How it is asked for.
: "${TPU_REQUEST:=queued}"                # queued: waits until there is room; direct: now or never
: "${TPU_CAPACITY:=spot}"                 # spot: cheap, may be taken away; on-demand; reserved
: "${TPU_ADDRESSES:=external}"            # internal: without public addresses (needs Cloud NAT)
: "${TPU_SERVICE_ACCOUNT:=}"              # the account its machines act as; empty: the default one

# What is installed on every worker, again after each preemption.
: "${TPU_EXTRAS:=tpu,gcs}"                # the extras of demyrl, see setup.py
: "${TPU_PYTHON:=3.12}"                   # the images bring an older Python than demyrl needs
: "${TPU_SETUP:=}"                        # a command to run afterwards, such as hf download ...

# Where runs are kept, and how patient watch.sh is.
: "${TPU_BUCKET:=}"                       # gs://BUCKET/FOLDER, for sync.sh
: "${TPU_POLL_S:=60}"                     # seconds between two looks at the state
: "${TPU_TRIES:=10}"                      # failures in a row to get a machine before it gives up
: "${TPU_RESTARTS:=3}"                    # times to start the command again after an error of its own
