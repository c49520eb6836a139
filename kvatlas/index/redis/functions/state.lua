-- state: a worker's active holder at this moment (HolderState in kvatlas/index/redis/records.py).
--
-- KEYS 1 workers
--      2 digests
--      3 steps
--      4 marked
-- ARGV 1 worker
-- returns msgpack {incarnation, seq, active holder, its digest, applied steps of the worker's next message, digest of the
--   holder's marks (false: it has none)}; false if the worker has no active holder
register_read_only('kvatlas_state', function(keys, args)
  local packed = redis.call('HGET', keys[1], args[1])
  local record = packed and cmsgpack.unpack(packed)
  if not record or record[ACTIVE] == '' then
    return cmsgpack.pack(false)
  end
  local incarnation, seq, holder = record[INCARNATION], record[SEQ], record[ACTIVE]
  local steps = steps_applied(redis.call('HGET', keys[3], args[1]), incarnation, seq + 1)
  local marks = redis.call('HGET', keys[4], holder)
  local digest = read_digest(keys[2], holder)
  return cmsgpack.pack({ incarnation, seq, holder, digest, steps, marks and unpack_marks(marks).words })
end, 1)
