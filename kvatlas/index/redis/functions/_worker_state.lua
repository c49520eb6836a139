-- Workers as a scrub compares them with their digests: see kvatlas/index/redis/scrub.py and recount.py.

local STATE_COST = 5 -- of a worker in a scrub's budget

-- Returns a worker's state at this moment: {incarnation, seq, active holder, the holder's digest, 1 if the holder's own entries
-- name this worker, otherwise 0, steps of the next message that are applied, 1 if the holder has marks, otherwise 0}
-- (HolderState in kvatlas/index/redis/records.py), and the active holder; false without one.
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

-- Returns a worker's marks at this moment: {incarnation, seq, active holder, digest of its marks; false: none, steps of the next
-- message that are applied} (MarksState in kvatlas/index/redis/records.py), and the active holder; false without one.
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
