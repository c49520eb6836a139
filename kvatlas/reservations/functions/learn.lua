-- Evidence of workers' rates (kvatlas/cost/regression.py), stored as cmsgpack { form, requests, sums }.

-- learn: adds evidence to what is stored. Evidence of another form is replaced, that of workers that the pool does not have is
-- dropped.
--
-- KEYS see _layout.lua
-- ARGV 1 cmsgpack { form, { worker, requests, factor of older evidence, factor of older errors, sums }... }
--      2 how many of the sums are errors: the first ones
-- returns 0
register('kvatlas_pool_learn', function(keys, args)
  local reports, errors = cmsgpack.unpack(args[1]), tonumber(args[2])
  local form = table.remove(reports, 1)
  for _, report in ipairs(reports) do
    local worker, requests, keep, errors_keep, sums = unpack(report)
    if redis.call('HEXISTS', keys[LOAD], worker) == 1 then
      local packed = redis.call('HGET', keys[RATES], worker)
      if packed then
        local known_form, known_requests, known_sums = unpack(cmsgpack.unpack(packed))
        if known_form == form then
          requests = requests + known_requests
          for j = 1, #sums do
            sums[j] = known_sums[j] * (j <= errors and errors_keep or keep) + sums[j]
          end
        end
      end
      redis.call('HSET', keys[RATES], worker, cmsgpack.pack({ form, requests, sums }))
    end
  end
  return 0
end)

-- learned: every worker's evidence.
--
-- KEYS see _layout.lua
-- returns {worker, cmsgpack evidence...}
register_read_only('kvatlas_pool_learned', function(keys)
  return redis.call('HGETALL', keys[RATES])
end)
