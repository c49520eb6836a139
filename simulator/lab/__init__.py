"""The lab replays a request trace against simulated engines in virtual time, once for each policy, and compares them.

traces, generated_requests -> requests -> replay <- policies (selection)
                                  engines -> ledger -> wire -> memory index -> pricing and reservations
                                             replay -> outcome -> report
"""
