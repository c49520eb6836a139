local MOST_WORDS, MOST_TEXTS = 400, 600000 -- of a call: ids and texts, and bytes of both; a text has at most 2,600 bytes

-- scope: registers scopes: the full text behind each id, and the time at which a message last used it. If an id already has a
-- text, that one stays.
--
-- KEYS 1 scopes
--      2 scope uses
-- ARGV scope id, canonical text, scope id, canonical text...
-- returns nothing, or the first scope id that has another text, and that text; the scopes after it are not registered
register_always('kvatlas_scope', function(keys, args)
  local scopes, uses, now = keys[1], keys[2], string.format('%d', now_ms())
  for i = 1, #args, 2 do
    local scope_id, text = args[i], args[i + 1]
    redis.call('HSETNX', scopes, scope_id, text)
    redis.call('ZADD', uses, now, scope_id)
    local stored = redis.call('HGET', scopes, scope_id)
    if stored ~= text then return { scope_id, stored } end
  end
  return {}
end, MOST_WORDS, MOST_TEXTS)
