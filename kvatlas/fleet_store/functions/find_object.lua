-- find_object: the worker that has an object.
--
-- KEYS 1 newer objects   HASH  object id -> worker id
--      2 older objects   HASH  object id -> worker id
-- ARGV 1 object id
-- returns the worker id; an empty list if it is unknown
register('kvatlas_fleet_find_object', function(keys, args)
  local worker = redis.call('HGET', keys[1], args[1]) or redis.call('HGET', keys[2], args[1])
  return worker and { worker } or {}
end)
