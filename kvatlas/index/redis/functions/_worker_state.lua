-- A worker's state for a scrub, which compares its blocks and marks with its digests: see kvatlas/index/redis/scrub.py,
-- recount.py.

local STATE_COST = 5 -- budget cost of a worker in a scrub
local MOST_SCRUB, MOST_SCRUBBED = 1000, 64 -- the highest budget of a call, and how many workers it may name
local MOST_LOOKED, MOST_LOOKED_BYTES = 64, 8192 -- arguments of a look, and bytes in them

-- Returns a worker's state at this moment (HolderState in kvatlas/index/redis/records.py) and its active holder; false if it
-- has none. {incarnation, seq, active holder, the holder's digest, 1 if the entries of `holders` and `active` name this worker,
-- otherwise 0, applied steps of the next message, digest of the holder's marks (false: it has none)}
-- keys: from `first` on workers, holders, active, digests, steps, marked
local function state_of(keys, first, worker)
  local workers, holders, active, digests, all_steps, marked = unpack(keys, first, first + 5)
  local packed = redis.call('HGET', workers, worker)
  local record = packed and cmsgpack.unpack(packed)
  if not record or record[ACTIVE] == '' then
    return false
  end
  local holder = record[ACTIVE]
  local state, owner = unpack_holder(redis.call('HGET', holders, holder))
  local registered = state == ACTIVE_STATE and owner == worker and redis.call('HGET', active, holder) == worker and 1 or 0
  local steps = steps_applied(redis.call('HGET', all_steps, worker), record[INCARNATION], record[SEQ] + 1)
  local marks = redis.call('HGET', marked, holder)
  local words = marks and unpack_marks(marks).words
  return { record[INCARNATION], record[SEQ], holder, read_digest(digests, holder), registered, steps, words }, holder
end
