-- learn: evidence of workers' rates is added to what is there; of workers that the pool does not have it is dropped.
-- KEYS: see _pool.lua
-- ARGV: cmsgpack { form, { worker, requests, what these leave of older evidence, of older errors, sums }... }; of the sums as
--   many as ARGV 2 says are errors. Evidence of another form is not added to but replaced.
register('kvatlas_pool_learn', function(keys, args)
  local told, errors = cmsgpack.unpack(args[1]), tonumber(args[2])
  for i = 2, #told do
    local worker, requests, keep, errors_keep, sums = unpack(told[i])
    if redis.call('HEXISTS', keys[LOAD], worker) == 1 then
      local packed = redis.call('HGET', keys[RATES], worker)
      local known = packed and cmsgpack.unpack(packed)
      if known and known[1] == told[1] then
        requests = requests + known[2]
        for j = 1, #sums do
          sums[j] = known[3][j] * (j <= errors and errors_keep or keep) + sums[j]
        end
      end
      redis.call('HSET', keys[RATES], worker, cmsgpack.pack({ told[1], requests, sums }))
    end
  end
  return 0
end)

-- learned: the evidence of every worker's rates.
-- KEYS: see _pool.lua
-- returns worker, cmsgpack { form, requests, sums }, ...
redis.register_function({
  function_name = 'kvatlas_pool_learned',
  callback = function(keys)
    return redis.call('HGETALL', keys[RATES])
  end,
  flags = { 'no-writes' },
})
