-- doubt: records that a worker's blocks differ from its digest, so that it needs a new incarnation. The scopes in which blocks
-- were found are added to those that the holder used, so that the sweep looks there.
--
-- KEYS 1 workers
--      2 touched
-- ARGV 1 worker
--      2 incarnation (8 bytes)
--      3 holder
--      4 server on which the blocks were counted
--      5... scope ids
-- returns 1; 0 if the worker has another incarnation or was cleared, or if this is another server
register_always('kvatlas_doubt', function(keys, args)
  local workers, touched, worker, incarnation, holder = keys[1], keys[2], args[1], args[2], args[3]
  local packed = redis.call('HGET', workers, worker)
  local record = packed and cmsgpack.unpack(packed)
  if not record or record[INCARNATION] ~= incarnation or record[ACTIVE] ~= holder or args[4] ~= server_id() then
    return 0
  end
  local uses = redis.call('HGET', touched, holder) or ''
  for i = 5, #args do
    local scope_id, known = args[i], false
    for at = 1, #uses, 16 do
      known = known or string.sub(uses, at, at + 7) == scope_id
    end
    if not known then
      uses = uses .. scope_id .. '\0\0\0\0\0\0\0\0'
    end
  end
  redis.call('HSET', touched, holder, uses)
  record[BAD] = 1
  redis.call('HSET', workers, worker, cmsgpack.pack(record))
  return 1
end, MOST_SCOPES, MOST_LIST)
