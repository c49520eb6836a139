-- scope: registers scopes: the full text behind each id, and the time at which a message last used it. If an id already has a
-- text, that one stays.
--
-- KEYS 1 scopes
--      2 scope uses
-- ARGV scope id, canonical text, scope id, canonical text...
-- returns the texts that are stored, in order
register_always('kvatlas_scope', function(keys, args)
  local scopes, uses, stored, now = keys[1], keys[2], {}, string.format('%d', now_ms())
  for i = 1, #args, 2 do
    local scope_id, text = args[i], args[i + 1]
    redis.call('HSETNX', scopes, scope_id, text)
    redis.call('ZADD', uses, now, scope_id)
    stored[#stored + 1] = redis.call('HGET', scopes, scope_id)
  end
  return stored
end, MOST_SCOPES, MOST_LIST)
