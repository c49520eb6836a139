-- locate: one block's active holders.
-- KEYS: blocks of the scope, active   ARGV: hash   returns {flags, 3-byte number, worker id...}
redis.register_function({
  function_name = 'kvatlas_locate',
  callback = function(keys, args)
    local value, out = redis.call('HGET', keys[1], args[1]) or '', {}
    for at = 1, #value, 4 do
      local worker = redis.call('HGET', keys[2], string.sub(value, at, at + 2))
      if worker then
        out[#out + 1] = string.byte(value, at + 3)
        out[#out + 1] = string.sub(value, at, at + 2)
        out[#out + 1] = worker
      end
    end
    return out
  end,
  flags = { 'no-writes' },
})
