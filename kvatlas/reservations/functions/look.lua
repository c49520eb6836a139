-- look: weigh offers and book nothing; see _weigh.lua.
-- KEYS: see _pool.lua   ARGV: ask
-- returns cmsgpack, see _weigh.lua
redis.register_function({
  function_name = 'kvatlas_pool_look',
  callback = function(keys, args)
    local answer = weigh(keys, cmsgpack.unpack(args[1]), now_us())
    return cmsgpack.pack(answer)
  end,
  flags = { 'no-writes' },
})
