-- Returns stored evidence of this form with this many sums; nil if it is missing or can't be read.
local function evidence_of(packed, form, sums)
  local done, known = pcall(cmsgpack.unpack, packed or '')
  if not done or type(known) ~= 'table' or known[1] ~= form or not is_finite(known[2]) or type(known[3]) ~= 'table' then
    return nil
  end
  for i = 1, sums do
    if not is_finite(known[3][i]) then
      return nil
    end
  end
  return known
end

-- learn: adds evidence of workers' rates (kvatlas/cost/regression.py) to what is stored as cmsgpack { form, requests, sums }.
-- Stored evidence that has another form or is damaged is replaced; evidence of workers that the pool does not have is dropped.
--
-- KEYS see _layout.lua
-- ARGV 1 cmsgpack { form, { worker, requests, factor of older evidence, factor of older errors, sums }... }
--      2 how many of the sums, the first ones, are errors
-- returns 0
register('kvatlas_pool_learn', function(keys, args)
  local reports, errors = unpack_rows(args[1], MOST_ROWS + 1), integer(args[2], 0)
  local form = table.remove(reports, 1)
  for _, report in ipairs(reports) do
    local worker, requests, keep, errors_keep, sums = unpack(report)
    if redis.call('HEXISTS', keys[LOAD], worker) == 1 then
      local known = evidence_of(redis.call('HGET', keys[RATES], worker), form, #sums)
      if known then
        requests = requests + known[2]
        for j = 1, #sums do
          sums[j] = known[3][j] * (j <= errors and errors_keep or keep) + sums[j]
        end
      end
      redis.call('HSET', keys[RATES], worker, cmsgpack.pack({ form, requests, sums }))
    end
  end
  return 0
end)
