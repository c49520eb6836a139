-- A worker's state for a scrub, which compares its blocks and marks with its digests: see kvatlas/index/redis/scrub.py,
-- recount.py.

local STATE_COST = 5 -- budget cost of a worker in a scrub
local MOST_SCRUB, MOST_SCRUBBED = 1000, 64 -- the highest budget of a call, and how many workers it may name
local MOST_LOOKED, MOST_LOOKED_BYTES = 64, 8192 -- arguments of a look, and bytes in them

-- Returns a worker's state at this moment (HolderState in kvatlas/index/redis/records.py) and its active holder; false if it
-- has none. {incarnation, seq, active holder, the holder's digest, 1 if the entries of `holders` and `active` name this worker,
-- otherwise 0, applied steps of the next message, 1 if the holder has marks, otherwise 0}
-- k: {workers, holders, active, digests, steps, marked = keys}
local function state_of(k, worker)
  local packed = redis.call('HGET', k.workers, worker)
  local record = packed and cmsgpack.unpack(packed)
  if not record or record[ACTIVE] == '' then
    return false
  end
  local holder = record[ACTIVE]
  local entry = redis.call('HGET', k.holders, holder)
  local registered = 0
  if entry then
    local state, owner = unpack(cmsgpack.unpack(entry))
    if state == ACTIVE_STATE and owner == worker and redis.call('HGET', k.active, holder) == worker then
      registered = 1
    end
  end
  local steps = steps_applied(redis.call('HGET', k.steps, worker), record[INCARNATION], record[SEQ] + 1)
  local marked = redis.call('HEXISTS', k.marked, holder)
  return { record[INCARNATION], record[SEQ], holder, read_digest(k.digests, holder), registered, steps, marked }, holder
end

-- Returns a worker's marks at this moment (MarksState in kvatlas/index/redis/records.py) and its active holder; false if it has
-- none. {incarnation, seq, active holder, digest of its marks (false: it has none), applied steps of the next message}
-- k: {workers, marked, steps = keys}
local function marks_state_of(k, worker)
  local packed = redis.call('HGET', k.workers, worker)
  local record = packed and cmsgpack.unpack(packed)
  if not record or record[ACTIVE] == '' then
    return false
  end
  local marks = redis.call('HGET', k.marked, record[ACTIVE])
  local steps = steps_applied(redis.call('HGET', k.steps, worker), record[INCARNATION], record[SEQ] + 1)
  return { record[INCARNATION], record[SEQ], record[ACTIVE], marks and unpack_marks(marks).words, steps }, record[ACTIVE]
end
