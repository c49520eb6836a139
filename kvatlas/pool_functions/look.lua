-- look: weigh offers and book nothing; see _weigh.lua.
-- KEYS: see _pool.lua   ARGV: ask
-- returns cmsgpack { number of the cheapest offer, weighed, number of the offer that computes the prompt alone (0: none), judged }
redis.register_function({
  function_name = 'kvatlas_pool_look',
  callback = function(keys, args)
    local chosen, weighed, _, prefill, judged = weigh(keys, cmsgpack.unpack(args[1]), now_us())
    return cmsgpack.pack({ chosen, weighed, prefill, judged })
  end,
  flags = { 'no-writes' },
})
