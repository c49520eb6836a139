-- ejections: adds to the counts of failing workers, ejects and readmits them, and lets one router try an ejected one again
-- (kvatlas/ejection/store.py).
--
-- KEYS 1 ejections  HASH  worker id -> cmsgpack { us of the last change, good and bad answers (fading), us at which its
--                  ejection ends (0: it is not ejected), how often it was ejected recently, router that may try it again, us
--                  until which that router may }
-- ARGV 1 router id
--      2 us after which an answer counts for half
--      3 us for which one router may try again
--      4 us without a change after which a worker is forgotten
--      5 cmsgpack { { worker, good, bad, verdict (VERDICT), ejections that the router knew of, us to eject for }... }
-- returns cmsgpack { { worker, good, bad, us left of its ejection (false: it is not ejected), times, prober or '' }... }
local VERDICT = { count = 'count', eject = 'eject', readmit = 'readmit', probe = 'probe' } -- kvatlas.ejection.store.Verdict
local MOST_EJECTIONS = 1024 -- recorded workers per pool; reports about further ones are dropped
local O_CHANGED, O_GOOD, O_BAD, O_ENDS, O_TIMES, O_PROBER, O_CLAIM_ENDS = 1, 2, 3, 4, 5, 6, 7

local function fade_ejection(record, now, half_life_us)
  local fading = 0.5 ^ (math.max(0, now - record[O_CHANGED]) / half_life_us)
  record[O_GOOD], record[O_BAD], record[O_CHANGED] = record[O_GOOD] * fading, record[O_BAD] * fading, now
end

local EJECTION_FORM = { 'number', 'number', 'number', 'number', 'number', 'string', 'number' }

-- Returns an unpacked record; nil if it is missing or can't be read.
local function unpack_ejection(packed)
  local done, record = pcall(unpack_record, packed or '', EJECTION_FORM, 'ejection')
  return done and record or nil
end

register('kvatlas_pool_ejections', function(keys, args)
  local ejections, router, now = keys[1], args[1], now_us()
  local half_life_us, claim_us, keep_us = integer(args[2], 1), integer(args[3], 0), integer(args[4], 0)
  for _, change in ipairs(unpack_rows(args[5], MOST_ROWS)) do
    local worker, good, bad, verdict, times, eject_us = unpack(change)
    local known = redis.call('HGET', ejections, worker)
    if known or redis.call('HLEN', ejections) < MOST_EJECTIONS then
      local record = unpack_ejection(known) or { now, 0, 0, 0, 0, '', 0 }
      fade_ejection(record, now, half_life_us)
      record[O_GOOD], record[O_BAD] = record[O_GOOD] + good, record[O_BAD] + bad
      if verdict == VERDICT.eject and times == record[O_TIMES] and record[O_ENDS] <= now then
        record[O_ENDS], record[O_TIMES], record[O_PROBER], record[O_CLAIM_ENDS] = now + eject_us, times + 1, '', 0
      elseif verdict == VERDICT.readmit then
        record[O_GOOD], record[O_BAD], record[O_ENDS], record[O_PROBER], record[O_CLAIM_ENDS] = good, 0, 0, '', 0
      elseif verdict == VERDICT.probe and record[O_ENDS] > 0 and record[O_ENDS] <= now and record[O_CLAIM_ENDS] <= now then
        record[O_PROBER], record[O_CLAIM_ENDS] = router, now + claim_us
      end
      redis.call('HSET', ejections, worker, cmsgpack.pack(record))
      redis.call('PEXPIRE', ejections, string.format('%d', math.ceil(keep_us / 1000)))
    end
  end
  local answer, flat = {}, read_whole(ejections, MOST_EJECTIONS)
  for i = 1, #flat, 2 do
    local record = unpack_ejection(flat[i + 1])
    if not record or now - record[O_CHANGED] > keep_us or record[O_CHANGED] > now + CLOCK_SLACK_US then
      redis.call('HDEL', ejections, flat[i])
    else
      fade_ejection(record, now, half_life_us)
      local left_us = record[O_ENDS] > 0 and record[O_ENDS] - now
      local prober = record[O_CLAIM_ENDS] > now and record[O_PROBER] or ''
      answer[#answer + 1] = { flat[i], record[O_GOOD], record[O_BAD], left_us, record[O_TIMES], prober }
    end
  end
  return cmsgpack.pack(answer)
end)
